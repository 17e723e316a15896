//! Servers that answer without end, redirect, or are reached with settings that no request can have.

#![expect(clippy::unwrap_used, reason = "panicking is how a test fails")]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

use dcp_core::error::error_chain;
use dcp_core::registry::{Access, OpenRequest, StorageOpener, StorageOptions};
use dcp_core::storage::{ObjectStream, StorageExt};
use dcp_core::{Storage, StorageError, StorageErrorKind as Kind};
use dcp_storage_object::ObjectOpener;
use dcp_testing::key;
use futures_util::TryStreamExt;

/// A server that answers each connection once, by a function of the request.
struct Server {
    address: String,
    /// The heads of the requests, with the bytes that went out in answer to each.
    answered: Arc<Mutex<Vec<(String, usize)>>>,
}

impl Server {
    fn start(host: u8, answer: impl Fn(&str, &mut Answer) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind((IpAddr::V4(Ipv4Addr::new(127, 0, 0, host)), 0)).unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let answered = Arc::new(Mutex::new(Vec::new()));
        let (answer, noted) = (Arc::new(answer), Arc::clone(&answered));
        spawn(move || {
            for stream in listener.incoming() {
                let (Ok(mut stream), answer, noted) = (stream, Arc::clone(&answer), noted.clone())
                else {
                    return;
                };
                spawn(move || {
                    let Some(head) = head_of(&mut stream) else { return };
                    let number = {
                        let mut noted = noted.lock().unwrap();
                        noted.push((head.clone(), 0));
                        noted.len() - 1
                    };
                    let mut out = Answer { stream, sent: 0 };
                    answer(&head, &mut out);
                    noted.lock().unwrap()[number].1 = out.sent;
                });
            }
        });
        Self { address, answered }
    }

    fn heads(&self) -> Vec<String> {
        self.answered.lock().unwrap().iter().map(|(head, _)| head.clone()).collect()
    }
}

fn head_of(stream: &mut TcpStream) -> Option<String> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).ok()?;
        head.extend(byte);
    }
    String::from_utf8(head).ok()
}

struct Answer {
    stream: TcpStream,
    sent: usize,
}

impl Answer {
    /// Sends bytes; `false` when the client has gone.
    fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        let is_sent = self.stream.write_all(bytes.as_ref()).is_ok();
        self.sent += if is_sent { bytes.as_ref().len() } else { 0 };
        is_sent
    }
}

/// The storages of all providers at an address, with secrets.
fn storages(address: &str) -> Vec<(&'static str, Arc<dyn Storage>)> {
    let common = StorageOptions::new()
        .with("attempts_max", "1")
        .with("deadline", "1")
        .with("aws_endpoint", address)
        .with("aws_region", "r")
        .with("aws_access_key_id", "ID")
        .with("aws_secret_access_key", "5ec7e7")
        .with("aws_session_token", "5ec7e7")
        .with("azure_endpoint", format!("{address}/account"))
        .with("azure_storage_account_name", "account")
        .with("azure_storage_account_key", "NWVjN2U3")
        .with("google_base_url", address)
        .with("google_bearer_token", "5ec7e7");
    let web = format!("{address}/bucket/run?X-Amz-Signature=5ec7e7");
    [
        ("s3", "s3://bucket/run"),
        ("azure", "az://bucket/run"),
        ("gcs", "gs://bucket/run"),
        ("http", web.as_str()),
    ]
    .into_iter()
    .map(|(name, url)| {
        let request = OpenRequest::new(url, Access::Read).with_options(common.clone());
        (name, block_on(ObjectOpener::new().open(&request)).unwrap())
    })
    .collect()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future)
}

fn error_of<T>(result: Result<T, StorageError>) -> StorageError {
    match result {
        Ok(_) => unreachable!("the server answers nothing right"),
        Err(error) => error,
    }
}

/// Of an error, its beginning is read; of a list, up to 64 MiB. A socket holds some more.
#[test]
fn no_answer_is_read_without_end() {
    const SOCKETS: usize = 24 << 20;
    for (status, max) in [("403 X", 0), ("404 X", 0), ("500 X", 0), ("200 OK", 64 << 20)] {
        let server = Server::start(1, move |head, answer| {
            let is_list = head.contains("list");
            let max_each = if is_list { max } else { 0 } + SOCKETS;
            answer.send(format!("HTTP/1.1 {status}\r\nContent-Type: application/xml\r\n\r\n"));
            if head.starts_with("HEAD") {
                return;
            }
            answer.send("<?xml version=\"1.0\"?><ListBucketResult><Name>bucket</Name>");
            let piece = "<Contents><Key>run/f</Key><Size>1</Size></Contents>".repeat(2000);
            while answer.sent <= max_each && answer.send(&piece) {}
            assert!(answer.sent <= max_each, "{status}: {} bytes for {head}", answer.sent);
        });
        for (name, storage) in storages(&server.address) {
            let error = error_of(block_on(storage.read_range(&key("object"), 0..10)));
            assert_ne!(error.kind(), Kind::AlreadyExists, "{name}, {status}");
            if name == "http" {
                continue;
            }
            let listed = |stream: ObjectStream| block_on(stream.try_collect::<Vec<_>>());
            let error = error_of(listed(storage.list(None)));
            if max > 0 {
                let text = error_chain(&error).to_string();
                assert!(text.contains("more than"), "{name}: {text}");
                assert_ne!(error.kind(), Kind::Transient, "{name}: it is read once");
            }
            error_of(block_on(storage.list_folder(None).try_collect::<Vec<_>>()));
        }
        let max = SOCKETS + max;
        let answered = server.answered.lock().unwrap();
        assert!(!answered.is_empty() && answered.iter().all(|(_, sent)| *sent <= max), "{status}");
    }
}

/// A length that no memory has is no reason to allocate it.
#[test]
fn a_list_of_any_length_is_refused_before_it_is_read() {
    let server = Server::start(1, |_, answer| {
        let len = 1_u64 << 62;
        answer.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {len}\r\n\r\n<?xml"));
        answer.send(" version=\"1.0\"?>");
    });
    for (name, storage) in storages(&server.address) {
        if name != "http" {
            error_of(block_on(storage.list(None).try_collect::<Vec<_>>()));
        }
    }
}

/// One key with a control character is no reason to fail for a whole prefix.
#[test]
fn a_list_leaves_out_keys_that_are_no_paths() {
    let server = Server::start(1, |_, answer| {
        let entry = |key: &str| {
            format!(
                "<Contents><Key>run/{key}</Key><Size>1</Size><ETag>\"a\"</ETag>\
                 <LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            )
        };
        let body = format!(
            "<?xml version=\"1.0\"?><ListBucketResult><Name>bucket</Name>{}{}{}{}</ListBucketResult>",
            entry("a"),
            entry("b&#x1;"),
            entry("c//d"),
            entry("e")
        );
        let len = body.len();
        answer.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n{body}"
        ));
    });
    for (name, storage) in storages(&server.address) {
        if !matches!(name, "s3" | "gcs") {
            continue;
        }
        let listed = block_on(storage.list(None).try_collect::<Vec<_>>()).unwrap();
        let keys: Vec<_> = listed.iter().map(|meta| meta.key.as_str()).collect();
        assert_eq!(keys, ["a", "e"], "{name}");
        let entries = block_on(storage.list_folder(None).try_collect::<Vec<_>>()).unwrap();
        assert_eq!(entries.len(), 2, "{name}");
    }
}

#[test]
fn no_secret_follows_a_redirect_to_another_host() {
    for status in ["301 X", "302 X", "303 X", "307 X", "308 X"] {
        let other = Server::start(2, |_, answer| {
            answer.send(
                "HTTP/1.1 206 X\r\nContent-Range: bytes 2-4/10\r\nContent-Length: 3\r\n\
                 Connection: close\r\n\r\n234",
            );
        });
        let location = format!("{}/elsewhere", other.address);
        let first = Server::start(1, move |_, answer| {
            answer.send(format!(
                "HTTP/1.1 {status}\r\nLocation: {location}\r\nContent-Length: 0\r\n\
                 Connection: close\r\n\r\n"
            ));
        });
        for (name, storage) in storages(&first.address) {
            let read = block_on(storage.read_range(&key("object"), 2..5));
            if name == "http" {
                assert_eq!(read.unwrap(), "234", "{status}");
                continue;
            }
            let text = error_chain(&error_of(read)).to_string();
            assert!(text.contains("127.0.0.2") && text.contains("signed"), "{name}: {text}");
            assert!(!text.contains("5ec7e7"), "{text}");
        }
        let heads = other.heads();
        assert_eq!(heads.len(), 1, "{heads:?}");
        let head = heads[0].to_ascii_lowercase();
        assert!(head.contains("range: bytes=2-4"), "{head}");
        for secret in ["5ec7e7", "referer", "authorization", "x-amz", "cookie"] {
            assert!(!head.contains(secret), "{head}");
        }
    }
}

#[test]
fn redirects_that_go_round_end() {
    let server = Server::start(1, |_, answer| {
        answer.send(
            "HTTP/1.1 302 X\r\nLocation: /again\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        );
    });
    let (_, storage) = storages(&server.address).pop().unwrap();
    let text = error_chain(&error_of(block_on(storage.stat(&key("object"))))).to_string();
    assert!(text.contains("10 redirects"), "{text}");
    assert!(server.heads().len() <= 22, "{}", server.heads().len());
}

/// Whatever a setting has in it, there is an error and no panic.
#[test]
fn settings_that_no_request_can_have_are_refused_by_name() {
    let settings = [
        ("s3://bucket/run", "aws_access_key_id"),
        ("s3://bucket/run", "aws_secret_access_key"),
        ("s3://bucket/run", "aws_session_token"),
        ("s3://bucket/run", "aws_region"),
        ("s3://bucket/run", "aws_endpoint"),
        ("s3://bucket/run", "user_agent"),
        ("gs://bucket/run", "google_bearer_token"),
        ("gs://bucket/run", "google_base_url"),
        ("az://bucket/run", "azure_storage_account_name"),
        ("az://bucket/run", "azure_storage_account_key"),
        ("az://bucket/run", "azure_storage_sas_token"),
        ("az://bucket/run", "azure_storage_token"),
        ("http://127.0.0.1:1/run", "user_agent"),
    ];
    let open = |url: &str, name: &str, value: &str| {
        let options = StorageOptions::new()
            .with("aws_access_key_id", "ID")
            .with("aws_secret_access_key", "5ec7e7")
            .with("aws_region", "r")
            .with("aws_endpoint", "http://127.0.0.1:1")
            .with("google_base_url", "http://127.0.0.1:1")
            .with("azure_endpoint", "http://127.0.0.1:1/a")
            .with("azure_storage_account_name", "a")
            .with("deadline", "1")
            .with("attempts_max", "1")
            .with(name, value);
        block_on(async {
            let request = OpenRequest::new(url, Access::Read).with_options(options);
            let storage = ObjectOpener::new().open(&request).await?;
            storage.stat(&key("object")).await
        })
    };
    for (url, name) in settings {
        for bad in ["5ec7\u{1}e7", "5ec7\ne7", "5ec7é", "5ec7\0"] {
            let error = error_of(open(url, name, bad));
            let text = error_chain(&error).to_string();
            assert!(error.kind() == Kind::Invalid && text.contains(name), "{name}: {text}");
            assert!(!text.contains("5ec7"), "{text}");
        }
    }
    for url in ["s3://a b/c", "s3://a<b/c", "gs://a\u{1}/c", "az://é/c", "s3://a%zz/c"] {
        assert_eq!(error_of(open(url, "user_agent", "x")).kind(), Kind::Invalid, "{url}");
    }
}
