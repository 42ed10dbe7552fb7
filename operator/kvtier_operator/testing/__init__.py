"""What tests of policies need: a policy that is accepted, and every way to spoil one."""
