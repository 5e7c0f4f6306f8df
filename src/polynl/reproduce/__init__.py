"""`polynl reproduce`: the paper in miniature, on your own machine."""
