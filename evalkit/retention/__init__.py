"""Does the conversation still remember? A fact is told, the model goes on talking, and on forks the fact is asked for."""
