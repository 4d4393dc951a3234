"""What the command `plan` computes and prints."""
