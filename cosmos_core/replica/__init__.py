"""Parts that both roles share: the line to the controller, the process around a role, the machine it is on."""
