"""Image classification: ImageFolder or scenes, a ResNet, Top-1 and Top-5."""
