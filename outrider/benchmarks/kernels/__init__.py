"""The kernels one by one: is the answer right, and how far is the time from the floor."""
