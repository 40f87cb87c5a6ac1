"""What the operating system gives: folders, files written whole, limits of a container or of a batch job."""
