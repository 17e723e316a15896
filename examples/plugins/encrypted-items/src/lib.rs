//! Items of checkpoints encrypted with XChaCha20-Poly1305, as an example of a stream transform.
//!
//! An item is stored as a random nonce of 19 bytes and segments of 64 KiB, each with a tag of 16 bytes. The number of
//! a segment and whether it is the last are in its nonce (the STREAM construction), so segments that were changed,
//! moved, repeated or cut off are errors. Items of equal length that were exchanged for each other, with the key
//! unchanged, are not: nothing in an item says which tensor it is. The index is not encrypted; it has names, dtypes and
//! shapes.

use std::fmt;

use bytes::Bytes;
use chacha20poly1305::XChaCha20Poly1305;
use chacha20poly1305::aead::generic_array::GenericArray;
use chacha20poly1305::aead::rand_core::RngCore as _;
use chacha20poly1305::aead::stream::{DecryptorBE32, EncryptorBE32};
use chacha20poly1305::aead::{KeyInit as _, OsRng};
use dcp_core::FormatError;
use dcp_core::format::{StreamEncoder, StreamTransform};

/// The name in the index.
const NAME: &str = "stream.encrypted@dcp.example";
const VERSION: &str = "1";
const NONCE: usize = 19;
const SEGMENT: usize = 64 << 10;
const TAG: usize = 16;

/// Encrypts items, and decrypts them.
pub struct EncryptedItems {
    cipher: XChaCha20Poly1305,
}

impl EncryptedItems {
    /// Items under this key, which is in no file.
    #[must_use]
    pub fn new(key: &[u8; 32]) -> Self {
        Self { cipher: XChaCha20Poly1305::new(key.into()) }
    }
}

impl fmt::Debug for EncryptedItems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncryptedItems").finish_non_exhaustive()
    }
}

impl StreamTransform for EncryptedItems {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> &str {
        VERSION
    }

    fn stored_max(&self, byte_len: u64) -> u64 {
        let segments = byte_len / SEGMENT as u64 + 1;
        byte_len.saturating_add(segments.saturating_mul(TAG as u64)).saturating_add(NONCE as u64)
    }

    fn encoder(&self) -> Box<dyn StreamEncoder> {
        Box::new(Encoder { cipher: self.cipher.clone(), item: None })
    }

    fn undo(&self, stored: &[u8], version: &str, limit: u64) -> Result<Vec<u8>, FormatError> {
        if version != VERSION {
            return Err(bad(format!("they are of version {version:?}, and this is {VERSION}")));
        }
        let Some((nonce, stored)) = stored.split_at_checked(NONCE) else {
            return Err(bad("they end within the nonce"));
        };
        let segments = stored.chunks(SEGMENT + TAG);
        let len = stored.len().saturating_sub(segments.len() * TAG);
        if len as u64 > limit {
            return Err(bad(format!(
                "they are of an item of {len} bytes, and at most {limit} are expected"
            )));
        }
        let mut item = Vec::with_capacity(len);
        let mut decryptor =
            DecryptorBE32::from_aead(self.cipher.clone(), GenericArray::from_slice(nonce));
        let wrong = |_| bad("they are damaged, or of another key");
        let mut segments = segments.peekable();
        while let Some(segment) = segments.next() {
            if segments.peek().is_none() {
                item.extend(decryptor.decrypt_last(segment).map_err(wrong)?);
                return Ok(item);
            }
            item.extend(decryptor.decrypt_next(segment).map_err(wrong)?);
        }
        // Even an empty item has a segment.
        Err(bad("they end behind the nonce"))
    }
}

/// Encrypts the items of a file.
struct Encoder {
    cipher: XChaCha20Poly1305,
    item: Option<Item>,
}

/// The item that is being encrypted.
struct Item {
    encryptor: EncryptorBE32<XChaCha20Poly1305>,
    /// The bytes of its next segment. A full one stays until the next byte shows that it is not the last.
    segment: Vec<u8>,
    /// The nonce, until it was passed on.
    nonce: Option<Bytes>,
}

impl StreamEncoder for Encoder {
    fn begin(&mut self, _byte_len: u64) -> Result<(), FormatError> {
        let mut nonce = [0; NONCE];
        let filled = OsRng.try_fill_bytes(&mut nonce);
        filled.map_err(|error| bad(format!("the system has no random numbers: {error}")))?;
        let encryptor =
            EncryptorBE32::from_aead(self.cipher.clone(), GenericArray::from_slice(&nonce));
        let nonce = Some(Bytes::copy_from_slice(&nonce));
        self.item = Some(Item { encryptor, segment: Vec::with_capacity(SEGMENT), nonce });
        Ok(())
    }

    fn push(&mut self, mut bytes: &[u8], out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        let item = self.item.as_mut().ok_or_else(no_item)?;
        item.nonce.take().into_iter().for_each(&mut *out);
        while !bytes.is_empty() {
            if item.segment.len() == SEGMENT {
                let segment = item.encryptor.encrypt_next(&*item.segment);
                out(segment.map_err(|_| too_long())?.into());
                item.segment.clear();
            }
            let (now, later) = bytes.split_at(bytes.len().min(SEGMENT - item.segment.len()));
            item.segment.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut dyn FnMut(Bytes)) -> Result<(), FormatError> {
        let item = self.item.take().ok_or_else(no_item)?;
        item.nonce.into_iter().for_each(&mut *out);
        let segment = item.encryptor.encrypt_last(&*item.segment);
        out(segment.map_err(|_| too_long())?.into());
        Ok(())
    }
}

fn bad(problem: impl Into<String>) -> FormatError {
    FormatError::new("encrypted bytes", problem)
}

fn no_item() -> FormatError {
    bad("no item was begun")
}

fn too_long() -> FormatError {
    bad("the item has more than 2^32 segments of 64 KiB")
}
