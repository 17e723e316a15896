//! A connection whose every record carries a proof that a rank of the job sent it, in this place.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::secret::KEY_LEN;
use crate::mesh::Channel;
use crate::mesh::frame::{invalid, is_pause};

/// The most payload of a record, in bytes.
const MAX_RECORD: usize = 32 << 10;

/// Bytes of the length before the payload.
const LEN: usize = 4;

/// Bytes of the proof after the payload: the first half of an HMAC-SHA256.
const TAG: usize = 16;

/// Makes and checks proofs in one direction.
struct Sealer {
    key: Hmac<Sha256>,
    /// Records so far. A record that is repeated, left out or moved has a wrong proof.
    count: u64,
}

impl Sealer {
    fn new(key: &[u8; KEY_LEN]) -> io::Result<Self> {
        Ok(Self { key: Hmac::new_from_slice(key).map_err(invalid)?, count: 0 })
    }

    fn mac(&mut self, payload: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.key.clone();
        mac.update(&self.count.to_le_bytes());
        mac.update(&(payload.len() as u64).to_le_bytes());
        mac.update(payload);
        self.count += 1;
        mac
    }

    /// Appends a record.
    fn seal(&mut self, payload: &[u8], to: &mut Vec<u8>) {
        let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        to.extend(len.to_le_bytes());
        to.extend_from_slice(payload);
        let tag = self.mac(payload).finalize().into_bytes();
        to.extend(tag.iter().take(TAG));
    }

    /// The payload of the record at the beginning of `bytes`, if all of it is there.
    fn open<'a>(&mut self, bytes: &'a [u8]) -> io::Result<Option<&'a [u8]>> {
        let Some((len, rest)) = bytes.split_first_chunk::<LEN>() else { return Ok(None) };
        let len = u32::from_le_bytes(*len) as usize;
        if len == 0 || len > MAX_RECORD {
            return Err(invalid("a record that no rank of this job sent"));
        }
        let (Some(payload), Some(tag)) = (rest.get(..len), rest.get(len..len + TAG)) else {
            return Ok(None);
        };
        match self.mac(payload).verify_truncated_left(tag) {
            Ok(()) => Ok(Some(payload)),
            Err(_) => Err(invalid("a record that no rank of this job sent")),
        }
    }
}

/// The keys of the two directions of a connection.
pub(super) struct Keys {
    pub(super) mine: [u8; KEY_LEN],
    pub(super) theirs: [u8; KEY_LEN],
}

/// A connection with a proof in every record. Nothing is encrypted.
pub(super) struct Sealed {
    inner: Arc<dyn Channel>,
    reading: Mutex<Reading>,
    writing: Mutex<Writing>,
}

struct Reading {
    sealer: Sealer,
    /// Bytes as they came, of at most one record beyond those of a read.
    raw: Box<[u8]>,
    filled: usize,
    payload: Vec<u8>,
    taken: usize,
}

struct Writing {
    sealer: Sealer,
    /// A record, of which `sent` bytes are sent.
    pending: Vec<u8>,
    sent: usize,
}

impl Sealed {
    pub(super) fn new(inner: Arc<dyn Channel>, keys: &Keys) -> io::Result<Self> {
        let reading = Reading {
            sealer: Sealer::new(&keys.theirs)?,
            raw: vec![0; LEN + MAX_RECORD + TAG].into(),
            filled: 0,
            payload: Vec::new(),
            taken: 0,
        };
        let sealer = Sealer::new(&keys.mine)?;
        let writing = Writing { sealer, pending: Vec::new(), sent: 0 };
        Ok(Self { inner, reading: Mutex::new(reading), writing: Mutex::new(writing) })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writing {
    fn flush(&mut self, to: &dyn Channel, wait: Duration) -> io::Result<()> {
        while let Some(rest) = self.pending.get(self.sent..).filter(|rest| !rest.is_empty()) {
            self.sent += to.write(rest, wait)?;
        }
        self.pending.clear();
        self.sent = 0;
        to.flush(wait)
    }
}

impl Reading {
    /// Opens the next record of those that came.
    fn advance(&mut self) -> io::Result<bool> {
        let raw = self.raw.get(..self.filled).unwrap_or_default();
        let Some(payload) = self.sealer.open(raw)? else { return Ok(false) };
        self.payload.clear();
        self.payload.extend_from_slice(payload);
        self.taken = 0;
        let record = LEN + payload.len() + TAG;
        self.raw.copy_within(record..self.filled, 0);
        self.filled -= record;
        Ok(true)
    }
}

impl Channel for Sealed {
    fn read(&self, into: &mut [u8], wait: Duration) -> io::Result<usize> {
        let reading = &mut *lock(&self.reading);
        while reading.taken == reading.payload.len() && !reading.advance()? {
            let free = reading.raw.get_mut(reading.filled..).unwrap_or_default();
            match self.inner.read(free, wait)? {
                0 if reading.filled > 0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                0 => return Ok(0),
                len => reading.filled += len,
            }
        }
        let ready = reading.payload.get(reading.taken..).unwrap_or_default();
        let len = ready.len().min(into.len());
        for (to, from) in into.iter_mut().zip(ready) {
            *to = *from;
        }
        reading.taken += len;
        Ok(len)
    }

    fn write(&self, bytes: &[u8], wait: Duration) -> io::Result<usize> {
        let writing = &mut *lock(&self.writing);
        writing.flush(&*self.inner, wait)?;
        let payload = bytes.get(..MAX_RECORD).unwrap_or(bytes);
        if payload.is_empty() {
            return Ok(0);
        }
        writing.sealer.seal(payload, &mut writing.pending);
        match writing.flush(&*self.inner, wait) {
            Err(error) if !is_pause(&error) => Err(error),
            _ => Ok(payload.len()),
        }
    }

    fn flush(&self, wait: Duration) -> io::Result<()> {
        lock(&self.writing).flush(&*self.inner, wait)
    }

    fn finish(&self) {
        self.inner.finish();
    }

    fn cut(&self) {
        self.inner.cut();
    }
}

impl std::fmt::Debug for Sealed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sealed").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// The payloads of records, up to one that is not whole.
pub(super) fn opened(key: &[u8; KEY_LEN], mut bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    let mut sealer = Sealer::new(key)?;
    let mut payloads = Vec::new();
    while let Some(payload) = sealer.open(bytes)? {
        payloads.push(payload.to_vec());
        bytes = bytes.get(LEN + payload.len() + TAG..).unwrap_or_default();
    }
    Ok(payloads)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEY: [u8; KEY_LEN] = [3; KEY_LEN];

    fn opened(bytes: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        super::opened(&KEY, bytes)
    }

    fn sealed(payloads: &[Vec<u8>]) -> Vec<u8> {
        let mut sealer = Sealer::new(&KEY).unwrap();
        let mut bytes = Vec::new();
        payloads.iter().for_each(|payload| sealer.seal(payload, &mut bytes));
        bytes
    }

    proptest! {
        #[test]
        fn records_round_trip_and_a_changed_bit_is_noticed(
            payloads in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 1..50), 1..5),
            flip: proptest::sample::Index,
            bit in 0_u8..8,
        ) {
            let mut bytes = sealed(&payloads);
            prop_assert_eq!(&opened(&bytes).unwrap(), &payloads);
            let at = flip.index(bytes.len());
            bytes[at] ^= 1 << bit;
            // A longer length waits for bytes that do not come.
            prop_assert!(opened(&bytes).is_err() || opened(&bytes).unwrap().len() < payloads.len());
        }

        #[test]
        fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
            let _ = opened(&bytes);
        }
    }

    #[test]
    fn records_repeated_left_out_or_moved_are_noticed() {
        let [one, two] = [vec![1], vec![2]];
        let bytes = sealed(&[one, two]);
        let (first, second) = bytes.split_at(bytes.len() / 2);
        for wrong in [[first, first], [second, first], [second, second]] {
            assert!(opened(&wrong.concat()).is_err());
        }
    }
}
