"""Text to samples: chats, answers and preference pairs as token ids with a mask of what is
trained."""
