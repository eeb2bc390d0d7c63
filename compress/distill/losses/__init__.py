"""What of a teacher's inside a student can be compared with; one file a loss, pure functions of tensors."""
