"""An agent for cosmos-core that repairs Python functions, in a sandbox."""
