//! Groups over TLS, and those whose certificate is of another authority.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::Duration;

use dcp_collectives::{Secret, TcpConfig, Tls, TlsError};
use dcp_core::{Collective, CollectiveError};
use dcp_testing::on_each;

use crate::groups::{config, listener, loopback, tcp_group};

fn file(name: &str) -> String {
    format!("{}/tests/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// A certificate of the authority of the job, or of another.
fn tls(name: &str) -> Tls {
    let files = [format!("{name}.pem"), format!("{name}.key")].map(|name| file(&name));
    Tls::from_files(&files[0], &files[1], file("ca.pem")).unwrap()
}

fn message(config: TcpConfig) -> String {
    match config.connect() {
        Err(CollectiveError::Rendezvous { message }) => message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn messages_arrive_encrypted_with_and_without_a_secret() {
    let secret = Secret::new([7; 32]).unwrap();
    let plain = tcp_group(3, |config| config.tls(tls("rank")));
    let both = tcp_group(3, |config| config.tls(tls("rank")).secret(secret.clone()));
    for group in [plain, both] {
        let results = on_each(group, |group| {
            let all = group.all_gather(vec![group.rank() as u8; 3_000_000].into())?;
            let right = all.iter().zip(0..).all(|(all, rank)| all.iter().all(|b| *b == rank));
            group.barrier().map(|()| right)
        });
        assert_eq!(results, vec![Ok(true); 3]);
    }
}

#[test]
fn a_certificate_of_another_authority_another_name_or_no_tls_is_refused() {
    let (listener, port) = listener();
    let timeout = Duration::from_millis(300);
    let master = |name: &str| config(0, 2, port).tls(tls(name));
    thread::scope(|scope| {
        let zero = scope.spawn(|| master("rank").listener(listener).connect());
        let rank = || config(1, 2, port);
        // The alert that says why may be lost with the connection.
        message(rank().connect_timeout(timeout).tls(tls("stranger")));
        let named = message(rank().tls(tls("rank").server_name("elsewhere").unwrap()));
        assert!(named.contains("certificate"), "{named}");
        let none = message(rank());
        assert!(none.contains("requires TLS"), "{none}");
        let one = config(1, 2, port).tls(tls("rank")).connect().unwrap();
        drop((zero.join().unwrap().unwrap(), one));
    });
}

#[test]
fn what_is_no_tls_behind_the_greeting_is_turned_away() {
    let (listener, port) = listener();
    let mut garbage = TcpStream::connect((loopback(), port)).unwrap();
    garbage.write_all(b"dcp-coll\x03\0\0\0\x02\0\0\0").unwrap();
    garbage.write_all(&[0x16; 5000]).unwrap();
    let group = on_each(vec![(0, Some(listener)), (1, None)], |(rank, listener)| {
        let config = config(rank, 2, port).tls(tls("rank"));
        match listener {
            Some(listener) => config.listener(listener).connect(),
            None => config.connect(),
        }
    });
    assert!(group.iter().all(Result::is_ok), "{group:?}");
    let mut answer = Vec::new();
    let _ = garbage.read_to_end(&mut answer);
    // A greeting and an alert.
    assert!(answer.len() < 100, "{}", answer.len());
}

#[test]
fn files_that_are_not_there_or_do_not_fit_are_named() {
    let missing = Tls::from_files(file("none.pem"), file("rank.key"), file("ca.pem")).unwrap_err();
    assert!(missing.to_string().contains("none.pem"), "{missing}");
    let swapped = Tls::from_files(file("rank.key"), file("rank.key"), file("ca.pem")).unwrap_err();
    assert!(matches!(swapped, TlsError::File { what: "the certificate", .. }), "{swapped}");
    let other = Tls::from_files(file("rank.pem"), file("stranger.key"), file("ca.pem"));
    assert!(matches!(other, Err(TlsError::Unusable { .. })), "{other:?}");
}
