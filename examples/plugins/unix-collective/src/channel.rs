//! A connection of two processes.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dcp_collectives::mesh::Channel;

/// A socket that carries the bytes as they are.
#[derive(Debug)]
pub(crate) struct UnixChannel(pub(crate) UnixStream);

impl Channel for UnixChannel {
    fn read(&self, into: &mut [u8], wait: Duration) -> io::Result<usize> {
        self.0.set_read_timeout(Some(wait))?;
        (&self.0).read(into)
    }

    fn write(&self, bytes: &[u8], wait: Duration) -> io::Result<usize> {
        self.0.set_write_timeout(Some(wait))?;
        (&self.0).write(bytes)
    }

    fn flush(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn finish(&self) {
        // A connection that has ended already needs no end.
        let _ = self.0.shutdown(Shutdown::Write);
    }

    fn cut(&self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}
