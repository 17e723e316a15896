//! Connections whose other end has not proven yet that it belongs to the job.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::mesh::TICK;

/// Handshakes that go on at the same time.
const MAX_GUESTS: usize = 128;

/// A connection in the lobby. A later one has a higher number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Guest(u64);

/// The handshakes under way. When there are too many, the oldest of the address that has the most of
/// them ends: strangers drive out each other, and cannot keep ranks out.
#[derive(Debug, Default)]
pub(super) struct Lobby {
    guests: Mutex<Guests>,
    left: Condvar,
}

#[derive(Debug, Default)]
struct Guests {
    next: u64,
    inside: HashMap<Guest, (IpAddr, Option<TcpStream>)>,
}

impl Guests {
    /// The guest that has to go.
    fn victim(&self) -> Option<Guest> {
        let mut by_address = HashMap::<IpAddr, (usize, Guest)>::new();
        for (guest, (address, stream)) in &self.inside {
            if stream.is_some() {
                let (count, oldest) = by_address.entry(*address).or_insert((0, *guest));
                *count += 1;
                *oldest = (*oldest).min(*guest);
            }
        }
        let most = by_address.into_values().max_by_key(|(count, oldest)| (*count, -oldest.age()));
        most.map(|(_, oldest)| oldest)
    }
}

impl Guest {
    fn age(self) -> i128 {
        self.0.into()
    }
}

impl Lobby {
    fn lock(&self) -> MutexGuard<'_, Guests> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection in, if need be in place of another. `None`: it has ended already, or `stop`.
    pub(super) fn enter(&self, stream: &TcpStream, stop: impl Fn() -> bool) -> Option<Guest> {
        let address = stream.peer_addr().ok()?.ip().to_canonical();
        let copy: io::Result<TcpStream> = stream.try_clone();
        let mut guests = self.lock();
        while guests.inside.len() >= MAX_GUESTS {
            if stop() {
                return None;
            }
            if let Some((_, stream)) =
                guests.victim().and_then(|victim| guests.inside.get_mut(&victim))
            {
                // Its thread reads the end and leaves.
                let stream = stream.take();
                drop(stream.map(|stream| stream.shutdown(Shutdown::Both)));
            }
            let waited = self.left.wait_timeout(guests, TICK);
            guests = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let guest = Guest(guests.next);
        guests.next += 1;
        guests.inside.insert(guest, (address, copy.ok()));
        Some(guest)
    }

    /// The connection is one of the job: it does not have to make way for others.
    pub(super) fn trust(&self, guest: Guest) {
        if let Some((_, stream)) = self.lock().inside.get_mut(&guest) {
            *stream = None;
        }
    }

    /// The handshake is over.
    pub(super) fn leave(&self, guest: Guest) {
        self.lock().inside.remove(&guest);
        self.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_the_address_with_the_most_goes_first() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut guests = Guests::default();
        for (number, last) in [(0, 1), (1, 2), (2, 2), (3, 3), (4, 2)] {
            let address = IpAddr::from([10, 0, 0, last]);
            guests.inside.insert(Guest(number), (address, stream.try_clone().ok()));
        }
        assert_eq!(guests.victim(), Some(Guest(1)));
        guests.inside.remove(&Guest(1));
        guests.inside.get_mut(&Guest(2)).unwrap().1 = None;
        // One each: the oldest of all.
        assert_eq!(guests.victim(), Some(Guest(0)));
    }
}
