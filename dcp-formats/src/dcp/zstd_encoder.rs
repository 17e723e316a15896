//! Writes items through zstd, as PyTorch's `ZStandard` stream extension does.

use std::io;

use bytes::Bytes;
use dcp_core::FormatError;
use zstd::stream::raw::{CParameter, Encoder, InBuffer, Operation as _, OutBuffer};

use crate::expansion::ItemKind;
use crate::upload::ItemEncoder;

/// Bytes of output at a time.
const OUTPUT_BYTES: usize = 128 << 10;
/// The first bytes of a skippable frame, before the length of its content.
const SKIPPABLE: [u8; 4] = 0x184D_2A50_u32.to_le_bytes();

/// Compression of items with zstd: the stream extension `ZStandard` of PyTorch 2.7 and later, which
/// loads what was written without any option.
///
/// An item is one frame, with its length and an XXH64 checksum of its content. A rank compresses one
/// item at a time, in 16 MiB at level 3. A reader decompresses a whole item even if it needs a part
/// of it.
///
/// Readers refuse bytes that expand without a limit. So an object of more than 64 MiB or a chunk of
/// more than 1 GiB that shrinks more than 256 times gets a skippable frame after its own, which makes
/// it as long as the 256th part of what it contains. An object of more than 1 GiB is not compressed.
///
/// ```
/// use std::sync::Arc;
///
/// use dcp_formats::dcp::{DcpWriter, Zstd};
/// # use dcp_core::Storage;
///
/// # fn example(storage: Arc<dyn Storage>) {
/// let writer = DcpWriter::builder(storage).zstd(Zstd::new().level(5).threads(4)).build();
/// # drop(writer);
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Zstd {
    level: i32,
    threads: u32,
}

impl Default for Zstd {
    fn default() -> Self {
        Self::new()
    }
}

impl Zstd {
    /// Level 3, PyTorch's, on the thread that writes.
    #[must_use]
    pub fn new() -> Self {
        Self { level: 3, threads: 0 }
    }

    /// The level: 1 (fastest) to 22 (smallest), and negative ones. zstd uses the nearest level that
    /// it has.
    #[must_use]
    pub fn level(mut self, level: i32) -> Self {
        self.level = level;
        self
    }

    /// Compresses each item on this number of additional threads, at most 200. The bytes differ from
    /// those of 0 threads, and are the same for 1 and more. Each thread needs about 16 MiB at level 3.
    #[must_use]
    pub fn threads(mut self, threads: u32) -> Self {
        self.threads = threads.min(200);
        self
    }

    /// A number that differs between settings.
    pub(super) fn fingerprint(self) -> u64 {
        let level = u64::from(self.level.unsigned_abs()) << 1 | u64::from(self.level < 0);
        (level << 8 | u64::from(self.threads)) << 1 | 1
    }

    /// The encoder of a file with items of these kinds and lengths in bytes.
    pub(super) fn encoder(self, items: Vec<(ItemKind, u64)>) -> ZstdEncoder {
        let (current, output) = (Current::default(), Vec::new());
        ZstdEncoder { options: self, items, current, encoder: None, output }
    }
}

/// The maximum length of the frame of `byte_len` bytes.
pub(super) fn frame_len_max(byte_len: u64) -> u64 {
    byte_len.saturating_add(byte_len >> 7).saturating_add(1024)
}

/// Makes a frame of each item of a file.
pub(super) struct ZstdEncoder {
    options: Zstd,
    items: Vec<(ItemKind, u64)>,
    current: Current,
    encoder: Option<Encoder<'static>>,
    output: Vec<u8>,
}

/// The item that is being encoded.
#[derive(Debug, Default)]
struct Current {
    /// The minimum length of its frames in bytes; `None` if it is not compressed.
    stored_min: Option<u64>,
    /// The bytes of its frames so far.
    stored: u64,
}

impl ZstdEncoder {
    fn start(options: Zstd) -> io::Result<Encoder<'static>> {
        let mut encoder = Encoder::new(options.level)?;
        encoder.set_parameter(CParameter::ChecksumFlag(true))?;
        encoder.set_parameter(CParameter::NbWorkers(options.threads))?;
        Ok(encoder)
    }

    fn encoder(&mut self) -> Result<&mut Encoder<'static>, FormatError> {
        self.encoder.as_mut().ok_or_else(|| FormatError::new("zstd stream", "no item was begun"))
    }

    /// Passes on the output of one step.
    fn step(
        &mut self,
        out: &mut dyn FnMut(Bytes),
        step: impl FnOnce(&mut Encoder<'static>, &mut OutBuffer<'_, Vec<u8>>) -> io::Result<usize>,
    ) -> Result<usize, FormatError> {
        let mut output = std::mem::take(&mut self.output);
        output.reserve_exact(OUTPUT_BYTES);
        let left = step(self.encoder()?, &mut OutBuffer::around(&mut output)).map_err(failed)?;
        self.current.stored += output.len() as u64;
        if output.len() * 2 > OUTPUT_BYTES {
            output.shrink_to_fit();
            out(output.into());
        } else {
            if !output.is_empty() {
                out(Bytes::copy_from_slice(&output));
            }
            output.clear();
            self.output = output;
        }
        Ok(left)
    }

    /// Passes on skippable frames until the item has its minimum length.
    fn pad(&mut self, stored_min: u64, out: &mut dyn FnMut(Bytes)) {
        let zeros = Bytes::from(vec![0; OUTPUT_BYTES]);
        while self.current.stored < stored_min {
            let missing = (stored_min - self.current.stored).saturating_sub(8);
            let len = u32::try_from(missing).unwrap_or(u32::MAX);
            out(Bytes::from([SKIPPABLE, len.to_le_bytes()].concat()));
            let mut left = len as usize;
            while left > 0 {
                let part = zeros.slice(0..left.min(OUTPUT_BYTES));
                left -= part.len();
                out(part);
            }
            self.current.stored += 8 + u64::from(len);
        }
    }
}

impl ItemEncoder for ZstdEncoder {
    fn begin(&mut self, position: usize) -> Result<(), FormatError> {
        let Some(&(kind, len)) = self.items.get(position) else {
            return Err(FormatError::new("zstd stream", "no such item was announced"));
        };
        self.current = Current { stored_min: kind.stored_min(len), stored: 0 };
        if self.current.stored_min.is_none() {
            return Ok(());
        }
        let mut encoder = match self.encoder.take() {
            Some(encoder) => encoder,
            None => Self::start(self.options).map_err(failed)?,
        };
        encoder.reinit().map_err(failed)?;
        encoder.set_pledged_src_size(Some(len)).map_err(failed)?;
        self.encoder = Some(encoder);
        Ok(())
    }

    fn push(&mut self, bytes: &[u8], out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        if self.current.stored_min.is_none() {
            bytes.chunks(OUTPUT_BYTES).for_each(|part| out(Bytes::copy_from_slice(part)));
            return Ok(());
        }
        let mut input = InBuffer::around(bytes);
        while input.pos() < bytes.len() {
            self.step(out, |encoder, output| encoder.run(&mut input, output))?;
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        let Some(stored_min) = self.current.stored_min else { return Ok(()) };
        while self.step(out, |encoder, output| encoder.finish(output, true))? > 0 {}
        self.pad(stored_min, out);
        Ok(())
    }
}

fn failed(error: io::Error) -> FormatError {
    FormatError::new("zstd stream", "it cannot be compressed").with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that zstd compresses a little, from a linear congruential generator.
    fn noise(len: usize, mask: u8) -> Vec<u8> {
        let mut state = 1_u64;
        let next = |state: &mut u64| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (*state >> 56) as u8
        };
        (0..len).map(|_| next(&mut state) & mask).collect()
    }

    fn chunks(items: &[Vec<u8>]) -> Vec<(ItemKind, u64)> {
        items.iter().map(|item| (ItemKind::Chunk, item.len() as u64)).collect()
    }

    fn encode(options: Zstd, items: &[Vec<u8>], at_once: usize) -> Vec<Vec<u8>> {
        let mut encoder = options.encoder(chunks(items));
        let encode = |(position, item): (usize, &Vec<u8>)| {
            let mut frame = Vec::new();
            let mut out = |bytes: Bytes| {
                assert!(bytes.len() <= OUTPUT_BYTES);
                frame.extend_from_slice(&bytes);
            };
            encoder.begin(position).unwrap();
            for piece in item.chunks(at_once) {
                encoder.push(piece, &mut out).unwrap();
            }
            encoder.finish(&mut out).unwrap();
            frame
        };
        items.iter().enumerate().map(encode).collect()
    }

    #[test]
    fn every_item_is_a_frame_with_its_length_and_checksum_within_the_limit() {
        let items = [vec![], noise(1, 255), vec![0; 3 << 20], noise(3 << 20, 255), noise(700, 3)];
        for threads in [0, 1, 3] {
            let frames = encode(Zstd::new().threads(threads), &items, 1 << 20);
            for (item, frame) in items.iter().zip(&frames) {
                assert_eq!(zstd::stream::decode_all(&**frame).unwrap(), *item);
                assert!(frame.len() as u64 <= frame_len_max(item.len() as u64));
                let has_checksum = frame[4] & 4 != 0;
                assert!(has_checksum);
            }
        }
    }

    #[test]
    fn bytes_do_not_depend_on_the_number_of_threads_or_pieces() {
        let items = [noise(5 << 20, 15), noise(100, 15)];
        let one = encode(Zstd::new().threads(1), &items, 1 << 20);
        assert_eq!(one, encode(Zstd::new().threads(4), &items, 12_345));
        let alone = encode(Zstd::new(), &items, 1 << 20);
        assert_eq!(alone, encode(Zstd::new(), &items, 777));
    }

    #[test]
    fn a_higher_level_makes_fewer_bytes() {
        let text: Vec<u8> =
            (0..60_000_u32).flat_map(|n| (n * n).to_string().into_bytes()).collect();
        let len =
            |level| encode(Zstd::new().level(level), std::slice::from_ref(&text), 1 << 20)[0].len();
        assert!(len(19) < len(3) && len(3) < len(-50));
    }

    #[test]
    fn an_item_of_another_length_than_announced_is_an_error() {
        let mut encoder = Zstd::new().encoder(vec![(ItemKind::Chunk, 5)]);
        encoder.begin(0).unwrap();
        let pushed = encoder.push(b"abc", &mut drop);
        assert!(pushed.and_then(|()| encoder.finish(&mut drop)).is_err());
        // The next item begins afresh.
        encoder.begin(0).unwrap();
        encoder.push(b"abcde", &mut drop).unwrap();
        encoder.finish(&mut drop).unwrap();
    }

    #[test]
    fn an_item_that_shrinks_too_far_is_padded_with_what_decoders_skip() {
        let zeros = vec![0; 1 << 20];
        let pieces = |len: usize| (0..len >> 20).map(|_| &*zeros);
        for (kind, len, is_padded) in [
            (ItemKind::Object, 64 << 20, false),
            (ItemKind::Object, 65 << 20, true),
            (ItemKind::Chunk, 65 << 20, false),
        ] {
            let mut encoder = Zstd::new().encoder(vec![(kind, len as u64)]);
            let mut stored = Vec::new();
            let mut out = |bytes: Bytes| stored.extend_from_slice(&bytes);
            encoder.begin(0).unwrap();
            pieces(len).for_each(|piece| encoder.push(piece, &mut out).unwrap());
            encoder.finish(&mut out).unwrap();
            assert_eq!(stored.len() * 256 >= len, is_padded, "{} of {len}", stored.len());
            assert!(stored.len() as u64 <= frame_len_max(len as u64));
            let decoded = zstd::stream::decode_all(&*stored).unwrap();
            assert!(decoded.len() == len && decoded.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn an_object_that_no_reader_decompresses_is_passed_on() {
        let len = (1 << 30) + 1;
        let mut encoder = Zstd::new().encoder(vec![(ItemKind::Object, len), (ItemKind::Chunk, 3)]);
        let mut stored = Vec::new();
        let mut out = |bytes: Bytes| stored.extend_from_slice(&bytes);
        let bytes = noise(300_000, 3);
        encoder.begin(0).unwrap();
        encoder.push(&bytes, &mut out).unwrap();
        encoder.finish(&mut out).unwrap();
        encoder.begin(1).unwrap();
        encoder.push(b"abc", &mut out).unwrap();
        encoder.finish(&mut out).unwrap();
        let frame = stored.split_off(bytes.len());
        assert_eq!(stored, bytes);
        assert_eq!(zstd::stream::decode_all(&*frame).unwrap(), b"abc");
    }
}
