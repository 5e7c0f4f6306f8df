"""Predictions of a trained model on images: pictures and files of classes or of detections."""
