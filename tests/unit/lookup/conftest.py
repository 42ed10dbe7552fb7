"""A directory for sockets, and no end of a connection that is taken for silent."""

from tests.support.lookup_fixtures import no_silence as no_silence
from tests.support.lookup_fixtures import run_directory as run_directory
