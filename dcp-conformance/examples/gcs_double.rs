//! Serves the double of Google Cloud Storage until standard input ends: `gcs_double BUCKET...`.
#![allow(clippy::print_stdout, reason = "a command-line tool")]

use std::io::Read;

use dcp_conformance::http::GcsDouble;

fn main() -> std::io::Result<()> {
    let buckets: Vec<String> = std::env::args().skip(1).collect();
    let buckets: Vec<&str> = buckets.iter().map(String::as_str).collect();
    let double = GcsDouble::start(&buckets)?;
    println!("serves {}", double.endpoint());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
