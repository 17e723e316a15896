//! How the processes of a job reach each other.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use dcp_collectives::mesh::{Arrivals, Channel, OpenError, Opening, Patience, Transport};
use dcp_core::Rank;

use crate::channel::UnixChannel;
use crate::hello::{HELLO_BYTES, LATER, REFUSED, WELCOME, decode, encode};

/// The deadline for the first message of a connection.
const HELLO_WAIT: Duration = Duration::from_secs(10);

/// How long to wait before it is looked again whether there is still something to wait for.
const TICK: Duration = Duration::from_millis(20);

/// The state of the thread that accepts connections.
#[derive(Debug)]
struct Desk {
    arrivals: Arrivals,
    stop: AtomicBool,
}

/// This process among the others. Dropping it ends the listener.
#[derive(Debug)]
pub(crate) struct UnixTransport {
    folder: PathBuf,
    rank: Rank,
    desk: Arc<Desk>,
    acceptor: Option<JoinHandle<()>>,
}

fn socket(folder: &Path, rank: Rank) -> PathBuf {
    folder.join(format!("rank-{rank}.sock"))
}

impl UnixTransport {
    /// Begins to accept connections of the other ranks.
    pub(crate) fn listen(folder: &Path, rank: Rank, world_size: u32) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let own = socket(folder, rank);
        match fs::remove_file(&own) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            // A process that was killed left it.
            _ => {}
        }
        let listener = UnixListener::bind(own)?;
        let desk =
            Arc::new(Desk { arrivals: Arrivals::new(world_size), stop: AtomicBool::new(false) });
        let acceptor = thread::Builder::new().name(format!("accept {rank}")).spawn({
            let desk = Arc::clone(&desk);
            move || desk.accept(&listener)
        })?;
        Ok(Self { folder: folder.to_owned(), rank, desk, acceptor: Some(acceptor) })
    }

    /// Connects and sends the first message. `None` when the peer may answer later.
    fn dial(
        &self,
        to: Rank,
        hello: &[u8],
        patience: Patience<'_>,
    ) -> Result<Option<UnixStream>, OpenError> {
        let failed = |error: io::Error| OpenError::Failed(format!("it cannot be reached: {error}"));
        let mut stream = match UnixStream::connect(socket(&self.folder, to)) {
            Ok(stream) => stream,
            // It has not started yet.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound
                        | io::ErrorKind::ConnectionRefused
                        | io::ErrorKind::WouldBlock
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(failed(error)),
        };
        stream.set_read_timeout(Some(TICK)).map_err(failed)?;
        stream.write_all(hello).map_err(failed)?;
        let mut answer = [REFUSED];
        while patience.left().is_some() {
            match stream.read(&mut answer) {
                Ok(0) => return Ok(None),
                Ok(_) if answer == [WELCOME] => return Ok(Some(stream)),
                Ok(_) if answer == [LATER] => return Ok(None),
                Ok(_) => return Err(OpenError::Failed("it refuses to talk".to_owned())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return Ok(None),
            }
        }
        Err(OpenError::Slow)
    }
}

impl Transport for UnixTransport {
    fn open(
        &self,
        to: Rank,
        opening: Opening,
        patience: Patience<'_>,
    ) -> Result<Arc<dyn Channel>, OpenError> {
        let unknown = || OpenError::Failed("this kind of channel is unknown".to_owned());
        let hello = encode(&opening).ok_or_else(unknown)?;
        while patience.left().is_some() {
            if let Some(stream) = self.dial(to, &hello, patience)? {
                return Ok(Arc::new(UnixChannel(stream)));
            }
            thread::sleep(TICK);
        }
        Err(OpenError::Slow)
    }

    fn arrivals(&self) -> &Arrivals {
        &self.desk.arrivals
    }
}

impl Drop for UnixTransport {
    fn drop(&mut self) {
        self.desk.stop.store(true, Ordering::SeqCst);
        let own = socket(&self.folder, self.rank);
        // The thread waits for a connection, and this is one.
        let woken = UnixStream::connect(&own).is_ok();
        if let Some(acceptor) = self.acceptor.take().filter(|_| woken) {
            let _ = acceptor.join();
        }
        let _ = fs::remove_file(own);
    }
}

impl Desk {
    fn accept(&self, listener: &UnixListener) {
        loop {
            let accepted = listener.accept();
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            // A peer whose connection breaks here tries again.
            let _ = accepted.and_then(|(stream, _)| self.admit(stream));
        }
    }

    fn admit(&self, mut stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(HELLO_WAIT))?;
        stream.set_write_timeout(Some(HELLO_WAIT))?;
        let mut hello = [0; HELLO_BYTES];
        stream.read_exact(&mut hello)?;
        let opening = decode(&hello)?;
        let away = self.arrivals.put(opening, || {
            let mut stream = stream.try_clone()?;
            stream.write_all(&[WELCOME])?;
            Ok(Arc::new(UnixChannel(stream)))
        })?;
        match away {
            Some(away) => stream.write_all(&[if away.retry { LATER } else { REFUSED }]),
            None => Ok(()),
        }
    }
}
