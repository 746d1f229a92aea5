"""Does what `fastreduce advise` says hold?"""
