//! Hashes of bytes, and their form as text.
//!
//! SHA-256 is for bytes that another program checks or that nobody may forge. FNV-1a is for names
//! and fingerprints among processes that trust each other: it is the same in every version of this
//! crate and on every machine, unlike [`std::hash::DefaultHasher`].

use sha2::Digest as _;

/// The 32 bytes of a SHA-256.
pub type Sha256Digest = [u8; 32];

/// SHA-256 of bytes that come one after another.
///
/// ```
/// use dcp_core::digest::{Sha256, hex, sha256};
///
/// let mut hash = Sha256::new();
/// hash.update(b"ab");
/// hash.update(b"c");
/// let digest = hash.finish();
/// assert_eq!(digest, sha256(b"abc"));
/// assert!(hex(&digest).starts_with("ba7816bf"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Sha256(sha2::Sha256);

impl Sha256 {
    /// The hash of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.update(bytes);
    }

    /// Adds the length of `bytes`, as eight little-endian bytes, and `bytes`: so two lists of parts
    /// have one hash only when all parts are equal.
    pub fn update_with_length(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.update((bytes.len() as u64).to_le_bytes());
        self.update(bytes);
    }

    /// The hash of all bytes that were added.
    #[must_use]
    pub fn finish(self) -> Sha256Digest {
        self.0.finalize().into()
    }
}

/// The SHA-256 of `bytes`.
#[must_use]
pub fn sha256(bytes: impl AsRef<[u8]>) -> Sha256Digest {
    sha2::Sha256::digest(bytes).into()
}

/// Two lower-case hexadecimal digits for each byte.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit =
        |nibble: u8| DIGITS.get(usize::from(nibble)).map_or('0', |digit| char::from(*digit));
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// The 64-bit FNV-1a hash of `bytes`.
#[must_use]
pub fn fnv1a_64(bytes: impl IntoIterator<Item = u8>) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(FNV_64_PRIME);
    bytes.into_iter().fold(FNV_64_BASIS, step)
}

/// The 128-bit FNV-1a hash of `bytes`.
#[must_use]
pub fn fnv1a_128(bytes: &[u8]) -> u128 {
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    bytes.iter().fold(BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

const FNV_64_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const FNV_64_PRIME: u64 = 0x0000_0100_0000_01b3;

/// A 64-bit checksum of numbers and bytes, eight bytes at a time: FNV-1a of words with a rotation.
/// Faster than [`fnv1a_64`] and other than it; for messages among ranks of one version.
#[derive(Clone, Copy, Debug)]
pub struct WordHash(u64);

impl Default for WordHash {
    fn default() -> Self {
        Self(FNV_64_BASIS)
    }
}

impl WordHash {
    /// The hash of nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a number.
    pub fn number(&mut self, n: u64) {
        self.0 = (self.0 ^ n).wrapping_mul(FNV_64_PRIME).rotate_left(23);
    }

    /// Adds the length of `bytes` and `bytes`.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word.iter_mut().zip(chunk).for_each(|(to, from)| *to = *from);
            self.number(u64::from_le_bytes(word));
        }
    }

    /// The hash of all that was added.
    #[must_use]
    pub fn finish(self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FIPS 180-4.
    #[test]
    fn sha256_is_that_of_the_standard() {
        let known = [
            ("", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            ("abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
        ];
        for (text, digest) in known {
            assert_eq!(hex(&sha256(text)), digest);
        }
    }

    /// The vectors of draft-eastlake-fnv.
    #[test]
    fn fnv1a_is_that_of_its_authors() {
        let hash = |text: &str| fnv1a_64(text.bytes());
        assert_eq!(hash(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(hash("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(hash("foobar"), 0x8594_4171_f739_67e8);
        assert_eq!(fnv1a_128(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(fnv1a_128(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
    }

    #[test]
    fn parts_with_lengths_are_not_their_concatenation() {
        let of = |parts: &[&str]| {
            let mut hash = Sha256::new();
            parts.iter().for_each(|part| hash.update_with_length(part));
            hash.finish()
        };
        assert_ne!(of(&["ab", "c"]), of(&["a", "bc"]));
    }

    /// Ranks of one version compare it, so it may change; it must not by accident.
    #[test]
    fn the_word_hash_is_known() {
        let mut hash = WordHash::new();
        hash.number(7);
        hash.bytes(b"0123456789");
        assert_eq!(hash.finish(), 0x53a3_848d_9b6f_78b0);
    }
}
