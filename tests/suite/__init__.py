"""How the tests are run: collected once, dealt out to forked workers, services forked, too."""
