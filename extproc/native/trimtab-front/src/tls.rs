//! The server's side of TLS, from a certificate and its key as PEM.

use std::fmt;
use std::sync::Arc;

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig};

/// What `Connection` takes.
pub type TlsConfig = Arc<ServerConfig>;

/// The certificate or its key cannot be used; the text says why.
#[derive(Debug)]
pub struct BadCertificate(String);

impl fmt::Display for BadCertificate {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for BadCertificate {}

/// The chain in `certificate`, own one first, and the key that belongs to it. Clients are not asked for theirs.
pub fn tls_config(certificate: &[u8], key: &[u8]) -> Result<TlsConfig, BadCertificate> {
    let chain: Vec<_> = CertificateDer::pem_slice_iter(certificate)
        .collect::<Result<_, _>>()
        .map_err(|error| BadCertificate(format!("the certificate: {error}")))?;
    if chain.is_empty() {
        return Err(BadCertificate("the certificate: there is none in the file".to_owned()));
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|error| BadCertificate(format!("the key: {error}")))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error: rustls::Error| BadCertificate(error.to_string()))?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}
