"""COCO's format and its scores, for every task that reads it: annotations, images, AP, what tasks share."""
