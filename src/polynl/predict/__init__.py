"""Detections of a trained model on images: pictures, and a file in COCO's format."""
