"""ContextCaching: the acceptance checks over every pool, the rules, the embedded pool, pools that fail, the EMS interface."""
