"""Losses on outputs and inner states of teacher and student; one file per loss, pure functions of tensors."""
