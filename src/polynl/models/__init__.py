"""Networks with blocks in them: `insert` for any model, `classifiers` for the paper's ResNets.

Nothing is imported here, so that `insert` can be had without torchvision.
"""
