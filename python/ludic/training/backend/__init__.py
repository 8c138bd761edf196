"""Where the model, its optimizer and its device are: forward, backward, optimizer step, save and
load."""
