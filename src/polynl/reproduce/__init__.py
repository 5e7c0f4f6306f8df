"""`polynl reproduce`: the paper in miniature, on the user's own machine."""
