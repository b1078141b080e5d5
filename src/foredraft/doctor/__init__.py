"""`foredraft doctor`: model, drafters and machine measured, and the speed-up predicted from acceptance and costs."""
