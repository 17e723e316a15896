//! Messages over the inner group: small messages, and the lengths of large ones.

use bytes::Bytes;
use dcp_core::{CollectiveError, Rank};

const WHOLE: u8 = 0;
const LENGTH: u8 = 1;

/// A message, or its length: then its bytes come over the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Header {
    Whole(Bytes),
    Length(u64),
}

impl Header {
    /// The header of a message: its length, from `threshold` bytes on, or else the message.
    pub(crate) fn of(message: &Bytes, threshold: u64) -> Self {
        match message.len() as u64 {
            len if len >= threshold => Self::Length(len),
            _ => Self::Whole(message.clone()),
        }
    }

    pub(crate) fn to_bytes(&self) -> Bytes {
        match self {
            Self::Whole(message) => [&[WHOLE], &message[..]].concat().into(),
            Self::Length(len) => [&[LENGTH], &len.to_le_bytes()[..]].concat().into(),
        }
    }

    /// Decodes the header that `from` sent.
    pub(crate) fn parse(
        bytes: &Bytes,
        from: Rank,
        op: &'static str,
        max_message: u64,
    ) -> Result<Self, CollectiveError> {
        let out_of_step = |message| CollectiveError::Mismatch { rank: from, op, message };
        match bytes.split_first() {
            Some((&WHOLE, _)) => Ok(Self::Whole(bytes.slice(1..))),
            Some((&LENGTH, len)) => {
                let len = len.try_into().map(u64::from_le_bytes);
                let len = len.map_err(|_| out_of_step("its length is damaged".to_owned()))?;
                if len > max_message {
                    let problem = "is longer than max_message, which is the same on all ranks:";
                    return Err(out_of_step(format!("{len} bytes {problem} {max_message}")));
                }
                Ok(Self::Length(len))
            }
            _ => Err(out_of_step("it does not use the same kind of group".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip_and_others_are_refused() {
        let parse = |bytes: &[u8]| Header::parse(&Bytes::copy_from_slice(bytes), 3, "broadcast", 9);
        for (message, expected) in [
            (Bytes::new(), Header::Whole(Bytes::new())),
            (Bytes::from_static(b"abc"), Header::Whole(Bytes::from_static(b"abc"))),
            (Bytes::from_static(b"abcd"), Header::Length(4)),
        ] {
            let header = Header::of(&message, 4);
            assert_eq!(header, expected);
            assert_eq!(parse(&header.to_bytes()), Ok(expected));
        }
        for damaged in [&[][..], &[2], &[1, 0], &Header::Length(10).to_bytes()] {
            let error = parse(damaged).unwrap_err();
            assert!(matches!(error, CollectiveError::Mismatch { rank: 3, .. }), "{error}");
        }
    }
}
