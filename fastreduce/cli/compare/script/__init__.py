"""A user's own training under several settings: speed in one training, quality in trainings of their own."""
