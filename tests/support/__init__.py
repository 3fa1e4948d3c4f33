"""What tests share: a real kernel to drive."""
