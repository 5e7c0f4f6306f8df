"""ResNets with blocks in them, feature pyramids for detectors, and files of weights."""
