//! In what the two protocols differ.

use super::objects::{Condition, Failure};

/// Whose protocol a server speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    Gcs,
    S3,
}

impl Dialect {
    /// The header that makes a put a copy.
    pub(super) fn copy_source(self) -> &'static str {
        match self {
            Self::Gcs => "x-goog-copy-source",
            Self::S3 => "x-amz-copy-source",
        }
    }

    /// Whether an object keeps a header.
    pub(super) fn is_kept(self, name: &str) -> bool {
        let prefix = match self {
            Self::Gcs => "x-goog-meta-",
            Self::S3 => "x-amz-meta-",
        };
        name.starts_with(prefix) || ATTRIBUTES.contains(&name)
    }

    /// The condition of a write with these headers.
    pub(super) fn condition<'a>(
        self,
        header: impl Fn(&str) -> Option<&'a str>,
    ) -> Result<Condition, Failure> {
        match self {
            Self::Gcs => match header("x-goog-if-generation-match") {
                None => Ok(Condition::None),
                Some(wanted) => match wanted.parse().map_err(|_| Failure::InvalidArgument)? {
                    0 => Ok(Condition::Absent),
                    generation => Ok(Condition::Generation(generation)),
                },
            },
            Self::S3 => Ok(match (header("if-none-match"), header("if-match")) {
                (Some("*"), _) => Condition::Absent,
                (_, Some(etag)) => Condition::Etag(etag.to_owned()),
                _ => Condition::None,
            }),
        }
    }
}

const ATTRIBUTES: [&str; 6] = [
    "cache-control",
    "content-disposition",
    "content-encoding",
    "content-language",
    "content-type",
    "x-goog-storage-class",
];
