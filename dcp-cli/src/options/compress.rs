//! How what is written is compressed.

use clap::Args;
use dcp::core::format::Compression;

use super::parse::parse_compression;

/// Compression of what is written.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Compress {
    /// Compress tensors and objects: zstd or zstd:LEVEL, where 1 is the fastest level, 22 the
    /// smallest and 3 the default. PyTorch 2.7 and later load it with the Python package zstandard
    /// or pyzstd. A dry run prints the sizes before compression. For dcp and torch-dist.
    #[arg(long, value_name = "METHOD", value_parser = parse_compression)]
    compress: Option<Compression>,
}

impl Compress {
    pub(crate) fn method(&self) -> Option<Compression> {
        self.compress.clone()
    }
}
