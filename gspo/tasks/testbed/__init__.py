"""The generated tasks of the testbeds, and the environments of studies."""
