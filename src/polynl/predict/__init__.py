"""What a trained model finds in images: pictures, and a file in COCO's format."""
