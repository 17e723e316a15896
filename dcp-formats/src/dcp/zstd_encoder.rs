//! Writes items through zstd, as PyTorch's `ZStandard` stream extension does.

use std::io;

use bytes::Bytes;
use dcp_core::FormatError;
use zstd::stream::raw::{CParameter, Encoder, InBuffer, Operation as _, OutBuffer};

use crate::upload::ItemEncoder;

/// Bytes of output at a time.
const OUTPUT_BYTES: usize = 128 << 10;

/// Compression of every item with zstd: the stream extension `ZStandard` of PyTorch 2.7 and later,
/// which loads what was written without any option.
///
/// An item is one frame, with its length and an XXH64 checksum of its content. A rank compresses one
/// item at a time, in 16 MiB at level 3. A reader decompresses a whole item even if it needs a part
/// of it.
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

    /// The encoder of a file with items of these lengths in bytes.
    pub(super) fn encoder(self, lens: Vec<u64>) -> ZstdEncoder {
        ZstdEncoder { options: self, lens, encoder: None, output: Vec::new() }
    }
}

/// The maximum length of the frame of `byte_len` bytes.
pub(super) fn frame_len_max(byte_len: u64) -> u64 {
    byte_len.saturating_add(byte_len >> 7).saturating_add(1024)
}

/// Makes a frame of each item of a file.
pub(super) struct ZstdEncoder {
    options: Zstd,
    lens: Vec<u64>,
    encoder: Option<Encoder<'static>>,
    output: Vec<u8>,
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
}

impl ItemEncoder for ZstdEncoder {
    fn begin(&mut self, position: usize) -> Result<(), FormatError> {
        let len = self.lens.get(position).copied();
        let mut encoder = match self.encoder.take() {
            Some(encoder) => encoder,
            None => Self::start(self.options).map_err(failed)?,
        };
        encoder.reinit().map_err(failed)?;
        encoder.set_pledged_src_size(len).map_err(failed)?;
        self.encoder = Some(encoder);
        Ok(())
    }

    fn push(&mut self, bytes: &[u8], out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        let mut input = InBuffer::around(bytes);
        while input.pos() < bytes.len() {
            self.step(out, |encoder, output| encoder.run(&mut input, output))?;
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        while self.step(out, |encoder, output| encoder.finish(output, true))? > 0 {}
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

    fn encode(options: Zstd, items: &[Vec<u8>], at_once: usize) -> Vec<Vec<u8>> {
        let mut encoder = options.encoder(items.iter().map(|item| item.len() as u64).collect());
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
        let mut encoder = Zstd::new().encoder(vec![5]);
        encoder.begin(0).unwrap();
        let pushed = encoder.push(b"abc", &mut drop);
        assert!(pushed.and_then(|()| encoder.finish(&mut drop)).is_err());
        // The next item begins afresh.
        encoder.begin(0).unwrap();
        encoder.push(b"abcde", &mut drop).unwrap();
        encoder.finish(&mut drop).unwrap();
    }
}
