"""Messages into token ids and back: one class for each way in which models are spoken to."""
