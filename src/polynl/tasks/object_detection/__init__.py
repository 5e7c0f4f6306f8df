"""Object detection: COCO files or scenes without masks, Faster R-CNN, AP of boxes."""
