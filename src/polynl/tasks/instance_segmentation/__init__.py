"""Instance segmentation: COCO files or scenes, Mask R-CNN, AP of boxes and masks."""
