"""What travels of a bucket under a setting: how it is made of gradients, summed, and becomes averages."""
