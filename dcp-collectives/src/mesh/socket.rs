//! A TCP connection as a channel.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use super::channel::Channel;

/// A TCP connection that carries the bytes as they are.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    /// The timeouts of the stream, which cost a system call to set.
    read_wait: Mutex<Option<Duration>>,
    write_wait: Mutex<Option<Duration>>,
}

impl Socket {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self { stream, read_wait: Mutex::default(), write_wait: Mutex::default() }
    }
}

fn set(
    known: &Mutex<Option<Duration>>,
    wait: Duration,
    set: impl FnOnce(Option<Duration>) -> io::Result<()>,
) -> io::Result<()> {
    let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
    if *known != Some(wait) {
        set(Some(wait))?;
        *known = Some(wait);
    }
    Ok(())
}

impl Channel for Socket {
    fn read(&self, into: &mut [u8], wait: Duration) -> io::Result<usize> {
        set(&self.read_wait, wait, |wait| self.stream.set_read_timeout(wait))?;
        (&self.stream).read(into)
    }

    fn write(&self, bytes: &[u8], wait: Duration) -> io::Result<usize> {
        set(&self.write_wait, wait, |wait| self.stream.set_write_timeout(wait))?;
        (&self.stream).write(bytes)
    }

    fn flush(&self, _: Duration) -> io::Result<()> {
        Ok(())
    }

    fn finish(&self) {
        drop(self.stream.shutdown(Shutdown::Write));
    }

    fn cut(&self) {
        drop(self.stream.shutdown(Shutdown::Both));
    }
}
