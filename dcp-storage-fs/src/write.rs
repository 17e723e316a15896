//! Writes a gather list to a file.

use std::fs::File;
use std::io::{self, BufWriter, IoSlice, Write};

use dcp_core::Payload;
use rustix::io::pwritev;

/// The maximum pieces of one call; Linux and macOS take up to 1024.
const PIECES: usize = 1024;

/// The maximum bytes of one call. From 2 MiB on, Linux looks for free memory of 2 MiB for each part of the
/// page cache, and moves pages to make some where memory is fragmented: such calls took up to ten times
/// as long.
const CALL_BYTES: usize = 512 << 10;

/// Pieces shorter than this on average are copied together: a call of a thousand of them would
/// move little.
const SHORT: u64 = 4096;

/// The memory for short pieces that are copied together.
const JOINED: usize = 1 << 20;

/// Writes all bytes of `payload`.
pub(crate) fn write_payload(file: &mut impl Write, payload: &Payload) -> io::Result<()> {
    #[cfg(test)]
    crate::kills::step();
    let pieces = payload.pieces();
    if pieces.len() > 1 && payload.len() / (pieces.len() as u64) < SHORT {
        let capacity = usize::try_from(payload.len()).map_or(JOINED, |len| len.min(JOINED));
        let mut joined = BufWriter::with_capacity(capacity, file);
        for piece in pieces {
            joined.write_all(piece)?;
        }
        return joined.flush();
    }
    let (mut call, mut byte_len) = (Vec::new(), 0);
    for part in pieces.iter().flat_map(|piece| piece.chunks(CALL_BYTES)) {
        if call.len() == PIECES || byte_len + part.len() > CALL_BYTES {
            write_slices(file, &mut call)?;
            call.clear();
            byte_len = 0;
        }
        call.push(IoSlice::new(part));
        byte_len += part.len();
    }
    write_slices(file, &mut call)
}

/// Writes all bytes of `payload` to a place in the file. Others may write to other places meanwhile.
pub(crate) fn write_payload_at(file: &File, byte_offset: u64, payload: &Payload) -> io::Result<()> {
    write_payload(&mut At { file, byte_offset }, payload)
}

/// A place in a file.
struct At<'a> {
    file: &'a File,
    byte_offset: u64,
}

impl Write for At<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let written = pwritev(self.file, slices, self.byte_offset)?;
        self.byte_offset += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write_slices(file: &mut impl Write, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
    #[cfg(test)]
    crate::kills::step();
    while !slices.is_empty() {
        match file.write_vectored(slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use proptest::prelude::*;

    use super::*;

    /// Takes a few bytes at a time, is interrupted now and then, and is full in the end.
    struct Reluctant {
        taken: Vec<u8>,
        step: usize,
        capacity: usize,
        calls: usize,
    }

    impl Write for Reluctant {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.write_vectored(&[IoSlice::new(bytes)])
        }

        fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
            self.calls += 1;
            if self.calls.is_multiple_of(3) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let room = self.step.min(self.capacity - self.taken.len());
            if room == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let before = self.taken.len();
            self.taken.extend(slices.iter().flat_map(|slice| slice.iter()).take(room));
            Ok(self.taken.len() - before)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn partial_writes_lose_and_repeat_nothing(
            lens in prop::collection::vec(prop_oneof![0_usize..50, 4000_usize..9000], 0..20),
            step in 500_usize..5000,
        ) {
            let pieces = (0..).zip(&lens).map(|(i, &len)| Bytes::from(vec![i; len]));
            let payload = pieces.collect::<Payload>();
            let expected = payload.to_bytes();
            let mut file =
                Reluctant { taken: vec![], step, capacity: expected.len(), calls: 0 };
            write_payload(&mut file, &payload).unwrap();
            prop_assert!(file.taken == expected);
            if !expected.is_empty() {
                let capacity = expected.len() - 1;
                let mut file = Reluctant { taken: vec![], step, capacity, calls: 0 };
                let error = write_payload(&mut file, &payload).unwrap_err();
                prop_assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            }
        }
    }

    #[test]
    fn parts_are_written_to_their_places_in_any_order() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let parts = [(7_u64, vec![2_u8; 5000]), (5007, vec![3; 9]), (0, vec![1; 7])];
        for (byte_offset, bytes) in &parts {
            let payload = bytes.chunks(4).map(Bytes::copy_from_slice).collect::<Payload>();
            write_payload_at(file.as_file(), *byte_offset, &payload).unwrap();
        }
        let expected = [vec![1; 7], vec![2; 5000], vec![3; 9]].concat();
        assert!(std::fs::read(file.path()).unwrap() == expected);
    }

    #[test]
    fn more_pieces_than_one_call_takes_are_written() {
        let pieces = (0..3000_u32).map(|i| Bytes::from(vec![i as u8; 4096 + i as usize % 7]));
        let payload = pieces.collect::<Payload>();
        let file = tempfile::NamedTempFile::new().unwrap();
        write_payload(&mut file.as_file(), &payload).unwrap();
        assert!(std::fs::read(file.path()).unwrap() == payload.to_bytes());
    }
}
