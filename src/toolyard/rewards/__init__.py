"""What an answer is worth. Knows of texts and numbers, not of rollouts or tools."""
