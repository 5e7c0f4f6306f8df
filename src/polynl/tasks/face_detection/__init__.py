"""Face detection: WIDER FACE or drawn faces, a RetinaNet, AP of Easy, Medium and Hard faces."""
