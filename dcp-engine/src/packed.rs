//! Compact encodings of the messages that every save sends, in place of one with field names.

use std::fmt;
use std::marker::PhantomData;
use std::time::Duration;

use dcp_core::wire::{MessageReader, MessageWriter};
use dcp_core::{PlanError, Rank};
use serde::de::{Error as _, Visitor};
use serde::{Deserializer, Serializer};

use crate::summary::FileTime;

/// A message that is sent as bytes.
pub(crate) trait Packed: Sized {
    const MAGIC: [u8; 4];

    fn pack(&self, out: &mut MessageWriter);

    fn unpack(input: &mut MessageReader<'_>) -> Result<Self, PlanError>;
}

/// Derives serde's traits from [`Packed`].
macro_rules! packed {
    ($($name:ident)*) => {$(
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::packed::serialize(self, serializer)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::packed::deserialize(deserializer)
            }
        }
    )*};
}
pub(crate) use packed;

pub(crate) fn serialize<T: Packed, S: Serializer>(
    message: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    let mut out = MessageWriter::new(T::MAGIC);
    message.pack(&mut out);
    serializer.serialize_bytes(&out.finish())
}

pub(crate) fn deserialize<'de, T: Packed, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    struct Unpack<T>(PhantomData<T>);

    impl<T: Packed> Visitor<'_> for Unpack<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("bytes")
        }

        fn visit_bytes<E: serde::de::Error>(self, bytes: &[u8]) -> Result<T, E> {
            let mut input = MessageReader::new(bytes, T::MAGIC).map_err(E::custom)?;
            let message = T::unpack(&mut input).map_err(E::custom)?;
            input.finish().map_err(E::custom)?;
            Ok(message)
        }
    }
    let unpack = Unpack(PhantomData);
    deserializer.deserialize_byte_buf(unpack).map_err(D::Error::custom)
}

pub(crate) fn bad(problem: &str) -> PlanError {
    let message = "a message of a save".to_owned();
    PlanError::message(message, problem)
}

/// Reads a length and as many bytes as an array has.
pub(crate) fn array<const N: usize>(input: &mut MessageReader<'_>) -> Result<[u8; N], PlanError> {
    input.bytes()?.try_into().map_err(|_| bad("a number of another length"))
}

pub(crate) fn flag(input: &mut MessageReader<'_>) -> Result<bool, PlanError> {
    match input.number()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(bad("neither yes nor no")),
    }
}

pub(crate) fn rank(input: &mut MessageReader<'_>) -> Result<Rank, PlanError> {
    Rank::try_from(input.number()?).map_err(|_| bad("a rank out of range"))
}

pub(crate) fn put_duration(out: &mut MessageWriter, duration: Duration) {
    out.number(duration.as_secs());
    out.number(duration.subsec_nanos().into());
}

pub(crate) fn duration(input: &mut MessageReader<'_>) -> Result<Duration, PlanError> {
    let (seconds, nanos) = (input.number()?, input.number()?);
    let nanos = u32::try_from(nanos).ok().filter(|nanos| *nanos < 1_000_000_000);
    Ok(Duration::new(seconds, nanos.ok_or_else(|| bad("a duration out of range"))?))
}

pub(crate) fn put_file(out: &mut MessageWriter, file: Option<&FileTime>) {
    out.number(file.is_some().into());
    if let Some(file) = file {
        out.number(file.rank.into());
        out.text(&file.file);
        out.number(file.bytes);
        put_duration(out, file.duration);
    }
}

pub(crate) fn file(input: &mut MessageReader<'_>) -> Result<Option<FileTime>, PlanError> {
    if !flag(input)? {
        return Ok(None);
    }
    let rank = rank(input)?;
    let (file, bytes) = (input.text()?.to_owned(), input.number()?);
    Ok(Some(FileTime { rank, file, bytes, duration: duration(input)? }))
}
