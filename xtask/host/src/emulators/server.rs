//! One server as a child process, which ends with this process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::Result;

/// Far more than any server needs to start; a hang is a failure, not a wait.
const LIMIT: Duration = Duration::from_secs(120);

/// A running server. Dropping it ends it.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    /// `http://127.0.0.1:PORT`, with the port that the server has from the system.
    pub(super) endpoint: String,
}

impl Server {
    /// Starts a server that ends when its standard input ends, and waits until it prints a line
    /// with its endpoint behind `before_endpoint`.
    pub(super) fn start(command: &mut Command, before_endpoint: &'static str) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot start {name}: {error}"))?;
        let output = child.stdout.take().ok_or("a child without output")?;
        let mut server = Self { child, endpoint: String::new() };
        let (found, endpoint) = mpsc::channel();
        // Reads to the end: a server with a full pipe would stop.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(std::io::Result::ok) {
                if let Some((_, endpoint)) = line.split_once(before_endpoint) {
                    // Nobody listens after the first one.
                    let _ = found.send(endpoint.trim().to_owned());
                }
            }
        });
        server.endpoint = endpoint.recv_timeout(LIMIT).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("{name} does not serve after {LIMIT:?}"),
            RecvTimeoutError::Disconnected => format!("{name} ended before it served"),
        })?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A child that has ended already cannot be killed; there is nothing to do about it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
