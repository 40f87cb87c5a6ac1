"""The version: of the package, and in what it writes."""

VERSION = "0.1.0"
