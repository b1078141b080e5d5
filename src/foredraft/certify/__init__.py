"""Certificates: evidence that a target with a drafter produces what the target alone would produce."""

from foredraft.certify.certificate import Certificate as Certificate
from foredraft.certify.certificate import CertifyPlan as CertifyPlan
from foredraft.certify.certificate import certify as certify
