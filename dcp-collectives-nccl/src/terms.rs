//! The settings that all ranks of a group must have in common.

/// The settings that rank 0 decides for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) threshold: u64,
    pub(crate) chunk_bytes: u64,
    pub(crate) max_message: u64,
}

impl Terms {
    pub(crate) const LEN: usize = 24;

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        [self.threshold, self.chunk_bytes, self.max_message].map(u64::to_le_bytes).concat()
    }

    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let (threshold, chunk_bytes, max_message) = (number(0)?, number(8)?, number(16)?);
        (chunk_bytes > 0).then_some(Self { threshold, chunk_bytes, max_message })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_round_trip_and_chunks_have_bytes() {
        let terms = Terms { threshold: 0, chunk_bytes: 7, max_message: u64::MAX };
        assert_eq!(Terms::parse(&terms.to_bytes()), Some(terms));
        assert_eq!(Terms::parse(&Terms { chunk_bytes: 0, ..terms }.to_bytes()), None);
        assert_eq!(Terms::parse(&[1; Terms::LEN - 1]), None);
    }
}
